"""What a model's text means: reasoning, tool calls, and the text itself."""
