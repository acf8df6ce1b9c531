"""Memory, traffic and the longest context of a training step, before any GPU is rented."""

from k3core.plan.inputs import ATTENTION as ATTENTION
from k3core.plan.inputs import MACHINES as MACHINES
from k3core.plan.inputs import Machine as Machine
from k3core.plan.inputs import Mesh as Mesh
from k3core.plan.inputs import Training as Training
from k3core.plan.inputs import packed as packed
from k3core.plan.states import present_targets as present_targets
from k3core.plan.step import Cut as Cut
from k3core.plan.step import Phase as Phase
from k3core.plan.step import Plan as Plan
from k3core.plan.step import Row as Row
from k3core.plan.step import cuts as cuts
from k3core.plan.step import largest_context as largest_context
from k3core.plan.step import plan as plan
from k3core.plan.traffic import Flow as Flow
