"""Images in prompts and results: opened, processed once for the model, and placed among tokens."""
