"""One file a model family: the markers of its output. Data only; ``freetoken.serving.parsers.select`` has the list."""
