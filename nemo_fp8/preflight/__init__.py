"""Checks before a run: what a machine can do, what a model needs, and what will not happen as meant.

Standard library only.

machine    what is here: GPU, driver, versions, processor
support    one row for each need: which recipe runs on which machine
engine     what runs a contract on a machine; what is refused before the run
doctor     which recipes a machine can run, and what is wrong with what is installed
shapes     which linears of a model run in FP8, as a table and as findings
memory     the memory of a training run on each GPU
lint       every finding about one contract
agreement  whether training and rollout multiply with the same values
"""
