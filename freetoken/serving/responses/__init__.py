"""The OpenAI Responses dialect: ``/v1/responses``."""
