"""Where memory and work go: pure functions from measurements to plans."""
