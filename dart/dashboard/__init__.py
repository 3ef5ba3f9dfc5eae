"""The dashboard: any number of runs in a browser, live or past.

    browser ── access.py ── app.py ──┬── library.py ── dart.inspection   JSON, one record of it for each page
              who may ask   routes   ├── live.py                         server-sent events
                                     ├── exports/                        a trajectory as HTML, GIF or MP4
                                     └── static/                         the pages, built from web/ (Svelte)

It changes nothing of a run. The only requests with an effect go to the run's coordinator, as those of any other client
of its Control service (dart.wire.levers).
"""
