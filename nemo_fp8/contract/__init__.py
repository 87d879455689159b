"""What a precision is: one frozen description, obeyed in training and in rollout. Standard library only.

operands     the operands of a linear's GEMMs, and how one of them is stored
precision    the contract: its fields, the storage of each operand, its checks
presets      one row a preset: NeMo's names and values
explain      a contract in plain words
te_variables the environment variables by which TransformerEngine takes a contract's settings
naming       a contract from a preset's name or a file
yaml         YAML that refuses a key given twice
"""

from nemo_fp8.contract.operands import GEMMS as GEMMS
from nemo_fp8.contract.operands import ROLES as ROLES
from nemo_fp8.contract.operands import ROLLOUT_BLOCKS as ROLLOUT_BLOCKS
from nemo_fp8.contract.operands import ROLLOUT_FIELDS as ROLLOUT_FIELDS
from nemo_fp8.contract.operands import SCALES as SCALES
from nemo_fp8.contract.operands import Operand as Operand
from nemo_fp8.contract.precision import SCALINGS as SCALINGS
from nemo_fp8.contract.precision import SIDES as SIDES
from nemo_fp8.contract.precision import Precision as Precision
