"""GPT-2 from and to the forms that others keep it in: `gptkernels convert A B`.

| form | path | read | written |
|---|---|---|---|
| Hugging Face | a folder with `config.json` | safetensors or `pytorch_model.bin`, or shards | `model.safetensors` |
| nanoGPT | `ckpt.pt` | yes, without running code | yes, for `init_from="resume"` too |
| llm.c | `.bin` | versions 1 and 3 (float32), 5 (bfloat16) | versions 3 and 5 |
| this package | `.safetensors` | models and training states | models |

Between the forms a parameter keeps its bits and its dtype, unless another dtype is asked for. What a form cannot say
is refused by name, or noted where the weights are right all the same.
"""

from gptkernels.convert.conversion import Converted, convert
from gptkernels.convert.files import load
from gptkernels.convert.forms import Form

__all__ = ["Converted", "Form", "convert", "load"]
