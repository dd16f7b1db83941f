"""flash-attn 2.8 for tests on CPU: its functions, its checks of arguments, and the same mathematics in fp32."""

from flash_attn.flash_attn_interface import (  # noqa: F401  # as in flash-attn
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)

__version__ = "2.8.3"
