"""Text models: prompts and chats over a tokenizer, word problems, models from a folder or a hub."""
