"""Reading and writing files: regular files only, each written whole or not at all, and safetensors."""
