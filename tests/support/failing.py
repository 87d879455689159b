"""A recipe that cannot be built."""


def recipe(precision):
    raise RuntimeError("broken on purpose")
