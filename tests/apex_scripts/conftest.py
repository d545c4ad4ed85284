"""The scripts of this folder are run, never imported."""

collect_ignore = ["dcgan_amp.py", "main_amp.py", "word_language_model.py"]
