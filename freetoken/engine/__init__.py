"""The group of actors as a whole: preparing a launch, building services, supervision, and the one-process runtime."""
