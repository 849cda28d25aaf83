"""What scripts/bench_frontend.py is made of: server and tokenizer_proc between two light stand-ins."""
