"""Where models come from: configurations, safetensors and GGUF files, and the places that hold them."""
