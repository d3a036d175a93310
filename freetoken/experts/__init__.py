"""The expert cache and the CPU executor: policies, figures and the services around the native servers."""
