"""Fakes and helpers for tests, shipped with the package."""
