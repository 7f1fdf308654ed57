"""Every class of faults in every phase, on real processes: does the job answer as it is promised?"""
