"""For every theme: property tests have no deadline, since a busy machine is no counterexample; what takes longest begins first."""

from hypothesis import settings

settings.register_profile("nemo_fp8", deadline=None)
settings.load_profile("nemo_fp8")

# Folders with files that take a minute. A worker that begins one of them at the end lets the other one wait for it.
LONGEST_FIRST = ("rl", "recipes", "report", "train")


def pytest_collection_modifyitems(items):
    places = {folder: i for i, folder in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path.parent.name, len(places)))
