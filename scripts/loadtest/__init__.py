"""The parts of scripts/bench_serve.py.

    options  ─► run ─► fleet ─► worker processes: load ─► client ─► scan
                 │             (workload ◄─ dataset)                 │ records
                 └──► summary ◄─ figures ◄───────────────────────────┘
                         └─► knee, report, plots, compare; outputs writes them

What servers and files of others hold goes through `foreign` first.

The parent only coordinates, watches the server's /metrics and draws; what sends and times requests are
worker processes, so that neither costs the other time. Clocks: `time.perf_counter`, which on Linux is
one clock for all processes.
"""
