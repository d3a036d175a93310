"""Real client programs, installed on demand, for tests that run them against a server of ours."""
