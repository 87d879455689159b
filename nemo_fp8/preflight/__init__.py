"""Before the run: what a machine can do, what a model needs, and what will go otherwise than was meant. Standard
library only.

machine    what is here: GPU, driver, versions, processor
support    one row a claim: which recipe runs on which machine
doctor     what of a contract this machine can run
shapes     which linears of a model run in FP8, as a table and as findings
memory     what a training takes on each GPU
lint       all of it about one contract
agreement  do two sides multiply with the same values?
"""
