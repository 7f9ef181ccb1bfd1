"""Text models: prompts and chats over a tokenizer, word problems, small GPT-2 and Llama shapes."""
