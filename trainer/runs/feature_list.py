"""The list of features, in the order in which a run applies them. Their files are in features/."""

from trainer.runs.features.adapter import ADAPTER, MERGED_BASE
from trainer.runs.features.best_model import BEST_MODEL
from trainer.runs.features.certify import CERTIFICATE
from trainer.runs.features.chosen_layout import LAYOUT
from trainer.runs.features.distillation import TEACHER
from trainer.runs.features.exact import EXACT
from trainer.runs.features.expert_balance import EXPERTS
from trainer.runs.features.hub import HUB
from trainer.runs.features.image_runs import IMAGES
from trainer.runs.features.module_trace import TRACE_FEATURE
from trainer.runs.features.rates import RATES
from trainer.runs.features.reference import REFERENCE, REFERENCE_LOG_PROBS
from trainer.runs.features.sample_trace import SAMPLE_TRACE
from trainer.runs.features.served_teacher import SERVED_TEACHER
from trainer.runs.features.streamed_run import STREAMING

FEATURES = (
    LAYOUT, RATES, STREAMING, MERGED_BASE, TEACHER, SERVED_TEACHER, REFERENCE, IMAGES, REFERENCE_LOG_PROBS, EXPERTS, TRACE_FEATURE, ADAPTER, EXACT,
    SAMPLE_TRACE, BEST_MODEL, CERTIFICATE, HUB,
)  # fmt: skip
