"""The HTTP front: one aiohttp server that turns API requests into ``SubmitRequest`` and tokens into text."""
