"""OpenAI request bodies in, records out: files, validation, tokenizer and templates."""
