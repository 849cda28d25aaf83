"""The parts of scripts/bench_serve.py.

    options  ─► run ─► fleet ─► worker processes: load ─► client ─► scan
                 │                                                   │ records
                 └──► summary ◄─ figures ◄───────────────────────────┘
                         └─► knee, report, plots, compare

The parent only coordinates, watches the server's /metrics and draws; what sends and times requests are
worker processes, so that neither costs the other time. Clocks: `time.perf_counter`, which on Linux is
one clock for all processes.
"""
