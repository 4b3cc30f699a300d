"""Reading and writing files: only regular files, written completely or not at all, and safetensors."""
