"""Scripts of the years of apex, run as they are: amplab where they import apex, the CPU where they ask for CUDA.

    amplab run [--device cpu] script.py arguments...

`as_apex` does the first from Python. CUDA calls are redirected by ``cuda_on_cpu``, which is imported when it is asked
for: the rest of this room waits for no torch.
"""

from amplab.scripts.apex_alias import ApexAlias, as_apex
from amplab.scripts.run_script import DEVICES, ScriptError, run_module, run_script

__all__ = ["DEVICES", "ApexAlias", "ScriptError", "as_apex", "run_module", "run_script"]
