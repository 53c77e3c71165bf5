"""Read banks and runs, in the terminal and in a browser.

source.py      what a folder holds: episodes with their advice, entries with their evidence, events
views.py       the same as the data of pages: charts, intervals, sums
app.py         the local page app
page.py        templates, and the static page of `experiential report`

`static/` holds htmx 2.0.11 and Pico CSS 2.1.1 as published on npm, with their licences.
"""
