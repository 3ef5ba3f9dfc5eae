"""Any run, live or past, as the dashboard and the terminal show it. Nothing here changes a run.

    records.py    what each page shows, as records; the dashboard's TypeScript types are generated from them
    the others    one module for each page: its queries on the run's database, and the records that it returns
"""
