"""Parts of chaos.py and chaos_ettr.py: schedules, strikes, and checks of the runs that went through them."""
