"""Run unmodified scripts that import apex: with amplab in place of apex, and with CUDA calls on the CPU if wanted.

    amplab run [--device cpu] script.py arguments...

`as_apex` puts amplab in place of apex from Python. ``cuda_on_cpu`` redirects CUDA calls. It is imported only for
``--device cpu``, since the rest of this room needs no torch.
"""

from amplab.scripts.apex_alias import ApexAlias, as_apex
from amplab.scripts.run_script import DEVICES, ScriptError, run_module, run_script

__all__ = ["DEVICES", "ApexAlias", "ScriptError", "as_apex", "run_module", "run_script"]
