"""Which tokens of which requests run in the next step. Plain Python: no I/O outside ``service.py``."""

from freetoken.scheduling.limits import SchedulerLimits
from freetoken.scheduling.scheduler import PlannedStep, Scheduler

__all__ = ["PlannedStep", "Scheduler", "SchedulerLimits"]
