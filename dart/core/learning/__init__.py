"""Whether anything is learnt: the run's recent numbers, and what keeps it from learning."""
