"""Checks before a run: what a machine can do, what a model needs, and what will not happen as meant.

Standard library only.

machine    what is here: GPU, driver, versions, processor
support    one row for each need: which recipe runs on which machine
doctor     which recipes, and which parts of a contract, this machine can run
shapes     which linears of a model run in FP8, as a table and as findings
memory     the memory of a training run on each GPU
lint       every finding about one contract
agreement  whether training and rollout multiply with the same values
"""
