"""How an episode is judged: `verdict` runs a task's evaluator, `checks` has its functions, `documents` reads files."""
