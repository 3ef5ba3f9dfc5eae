"""Any run, live or past, as the dashboard and the terminal show it. Nothing here changes a run.

records.py      what each page shows, as records; the dashboard's TypeScript types are generated from them
opening.py      a run's files, opened for reading alone
inspector.py    one object for a run: a method for each page
runs.py         the list of runs, and what is known of one as a whole
condition.py    what a run is doing now, and why it waits or has ended
the others      one module for each page: its queries on the run's database, and the records that it returns
"""
