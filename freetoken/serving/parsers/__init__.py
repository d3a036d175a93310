"""From the text a model writes to reasoning, answer and tool calls."""
