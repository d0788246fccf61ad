"""Text in, text out: tokenizers, chat templates, and streams that never split a character."""
