"""The list of features, in the order in which a run applies them. Each one is a file of its own."""

from trainer.runs.adapters import ADAPTER
from trainer.runs.certify import CERTIFICATE
from trainer.runs.chosen_layout import LAYOUT
from trainer.runs.distillation import TEACHER
from trainer.runs.expert_balance import EXPERTS
from trainer.runs.image_runs import IMAGES
from trainer.runs.module_trace import TRACE_FEATURE
from trainer.runs.precompute import REFERENCE_LOG_PROBS
from trainer.runs.streamed_run import STREAMING

FEATURES = (LAYOUT, STREAMING, TEACHER, IMAGES, REFERENCE_LOG_PROBS, EXPERTS, TRACE_FEATURE, ADAPTER, CERTIFICATE)
