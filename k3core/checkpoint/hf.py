"""Checkpoints of the released form, in and out: what the rest of the project uses of it.

names.py has what tensors are called, folder.py what must be in a folder, safetensors_io.py the files' bytes.
"""

from k3core.checkpoint.folder import Checkpoint as Checkpoint
from k3core.checkpoint.folder import Stored as Stored
from k3core.checkpoint.folder import open_checkpoint as open_checkpoint
from k3core.checkpoint.hf_plan import GENERATION_CONFIG as GENERATION_CONFIG
from k3core.checkpoint.hf_read import Progress as Progress
from k3core.checkpoint.hf_read import iter_tensors as iter_tensors
from k3core.checkpoint.hf_read import load_model as load_model
from k3core.checkpoint.hf_read import read_tensor as read_tensor
from k3core.checkpoint.hf_write import MAX_COPIED_BYTES as MAX_COPIED_BYTES
from k3core.checkpoint.hf_write import WEIGHT_SUFFIXES as WEIGHT_SUFFIXES
from k3core.checkpoint.hf_write import ExpertForm as ExpertForm
from k3core.checkpoint.hf_write import SaveSummary as SaveSummary
from k3core.checkpoint.hf_write import save_checkpoint as save_checkpoint
from k3core.checkpoint.names import is_foreign as is_foreign
