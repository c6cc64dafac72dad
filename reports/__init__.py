"""Charts, pages and number formats that the reports of runs and of load tests share. Imports no torch."""
