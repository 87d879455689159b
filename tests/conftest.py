"""For every theme: property tests have no deadline, since a busy machine is no counterexample."""

from hypothesis import settings

settings.register_profile("nemo_fp8", deadline=None)
settings.load_profile("nemo_fp8")
