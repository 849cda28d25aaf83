from engine.main import main

if __name__ == "__main__":
    main()
