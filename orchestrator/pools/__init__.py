"""The processes on the cluster that cells share: started, watched, replaced, ended."""
