"""Settings that all tests share."""

from hypothesis import settings

settings.register_profile("offload", deadline=None)  # the machine may be busy; a slow example is not a wrong one
settings.load_profile("offload")
