"""``python -m verl_workflow``: the command line, where its script is not on the path."""

from verl_workflow.cli import main

main()
