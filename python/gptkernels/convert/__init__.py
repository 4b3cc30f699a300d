"""Converts GPT-2 between the formats in which it is stored: `gptkernels convert A B`.

| format | path | read | written |
|---|---|---|---|
| Hugging Face | a folder with `config.json` | safetensors or `pytorch_model.bin`, or shards | `model.safetensors` |
| nanoGPT | `ckpt.pt` | yes, without running code | yes, for `init_from="resume"` too |
| llm.c | `.bin` | versions 1 and 3 (float32), 5 (bfloat16) | versions 3 and 5 |
| this package | `.safetensors` | models and training states | models |

Weights that the target cannot represent exactly raise a ValueError, unless `dtype` permits rounding.
`Converted.notes` says what else the target does not store.
"""

from gptkernels.convert.conversion import Converted, convert
from gptkernels.convert.files import load
from gptkernels.convert.forms import Form

__all__ = ["Converted", "Form", "convert", "load"]
