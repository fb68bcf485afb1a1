"""The application: command line, compression, report, benchmark, data sets and reference networks."""
