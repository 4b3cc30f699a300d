"""Reading of regular files, atomic writing, and safetensors."""
