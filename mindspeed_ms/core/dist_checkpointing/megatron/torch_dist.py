def read_manifest(folder, kind):
    raise NotImplementedError
