"""The Ray shell around the services of ``freetoken``: everything that imports ray is here."""
